"""`python -m longctx.settings`: every check between settings, with where it stands and which settings it is about."""

from longctx.settings.checks import table

for row in table():
    print(f"{row.place}: {row.what}\n    {' '.join(row.settings)}")
