"""Private or replaced parts of other libraries that longctx relies on, one module for each library.

Only these modules touch such names. tests/test_upstream.py checks that, and that the installed releases have them.
No library is imported before it is needed, except TRL, a class of which has a subclass here.
"""
