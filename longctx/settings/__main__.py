"""`python -m longctx.settings` prints every check between settings: its function, its summary and its settings."""

from longctx.settings.checks import table

for row in table():
    print(f"{row.place}: {row.what}\n    {' '.join(row.settings)}")
