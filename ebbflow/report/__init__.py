"""What a person and a program read of a run: one HTML page without references to other files,
summary.json, a table and a verdict for the terminal.

Where it fits
    Above ``registry`` and ``tracking``; ``plots`` renders its charts and pictures.

How
    - ``run_report``: the inputs of the report, the page, the summary and the table.
    - ``sides``: two evaluations side by side. ``pictures``: the first prompts under every policy,
      and those whose reward changed most.
    - ``categories``: means by category of the prompts.
    - ``glossary``: the meaning of every number. ``run_facts``: times, machine and versions.
    - ``page_environment``: the templates, which ``comparison`` uses as well.
    - ``outcome``: the last lines of a run in the terminal.

Gotchas
    - Prompts and names come from users: the templates escape everything.
    - The page is written once and must open years later: it references no file and no network.
"""

from ebbflow.extras import require

require("ebbflow.report", "matplotlib", "mlflow", "pandas")
