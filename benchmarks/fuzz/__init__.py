"""Damaged files of every kind that is read: what was read is right, or an error names the file.

    python -m benchmarks.fuzz                            # 10,000 files, 5 to 15 minutes on two cores
    python -m benchmarks.fuzz --files 200 --kinds jsonl parquet --seed 1

A whole file of each kind is made, then damaged by a few random changes: bits flipped, bytes cut off, doubled or moved,
strings put in that parsers stumble over, and in JSON values, keys and nesting. It is read by the code that a run reads
it with, in a process with bounds on memory and time. Data is prepared to the last row; a file that is accepted has to
give as many tokens, or documents, as an independent reader finds in it, and a checkpoint's manifest what was written.

`refused` is the typed error (ValueError) with the name of the file or its folder, `unnamed` the same without; the
columns from there on are failures.
"""
