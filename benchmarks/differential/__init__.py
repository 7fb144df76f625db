"""An adversary: random training runs, each compared with an independent reference on one process.

    python -m benchmarks.differential --seed 7 --minutes 30        # random cases
    python -m benchmarks.differential --default_set                # about 40 cases that cover all pairs of AXES
    python -m benchmarks.differential --replay case.json           # one case again, with its log

The modules in the order in which a case passes through them:

    space       what a case is: its dimensions, their values, and how a random one is drawn
    covering    a small set of cases in which every pair of values occurs
    models      the folder of a model: configuration, weights, tokenizer
    data        documents, and the files that hold them
    commands    the command line of a case, in one of several spellings
    processes   run a command line, in forked ranks or through a real launcher
    reference   train the same on one process with plain transformers; imports nothing of longctx
    judge       exact, refused, or a finding
    shrink      the simplest case with the same finding
    report      the table
"""
