"""How far each backend scales, simulated: H100 nodes of eight, 8 to 1,024 devices.

    python -m benchmarks.scaling                    # the page, minutes
    python -m benchmarks.scaling --output FOLDER    # and as FOLDER/table.md with its pictures

Every step is put together by `benchmarks.scaling.simulate` from the plan of the documents that the ranks get: nothing
here is measured. Rows hold either one document, or documents of the length histogram in benchmarks/data, cut to the
row's length and packed best-fit-decreasing; what a pack leaves over is padding and counts as one more document.
"""
