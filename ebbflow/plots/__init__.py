"""Charts and image grids: what a person sees of a run, drawn from plain numbers and PNGs.

Where it fits: near the bottom. It imports ``ebbflow.data.records`` and nothing else of the library,
so that an online stage can draw its timeline and ``ebbflow.tracking`` its report without either of
them importing the other.

Why: a report page must open offline and years later. Charts are inline SVG whose text stays text;
pictures are ordinary PNGs.

How: ``charts`` draws the report's charts (SVG) and a stage's timeline (PNG); ``svg`` has their
style and renders them; ``images`` draws grids of captioned samples; ``pages`` renders HTML.

Gotchas: matplotlib takes about a second to import. Import ``charts`` where a chart is drawn, not at
the top of a module that trains. Nothing here touches pyplot or a global figure, so any thread may
draw.
"""
