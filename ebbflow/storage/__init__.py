"""What a run writes to a disk, and how a reader knows that it is whole.

Where it fits
    The lowest room beside ``ebbflow.recipe``: every room above writes its files through it and none
    does so on its own.

Why
    A run of hours dies in the middle: preempted, out of disk, killed. What it was writing must
    never look finished, what it had finished must survive, and two runs must never write into one
    folder.

How
    - ``disk``: one way to write atomically (``atomic_write``), a full disk as one error
      (``DiskFullError``), and ``safe_join`` for names that come from elsewhere.
    - ``artifacts``: committed folders: ``manifest.json`` (files, sizes, sha256), then ``COMMIT``
      (sha256 of the manifest).
    - ``tables``: Parquet files in streams, with their metadata and its sha256 in the footer.
    - ``locks``: one process per folder, by ``flock``.
    - ``identity``: sha256 of the code and of the inputs that a recipe names, to tell whether either
      changed.
    - ``sources``: whether a pod runs the sources that were submitted.

Gotchas
    - A folder without a COMMIT that matches does not exist for readers: open it with
      ``artifacts.verify``.
    - A lock ends with its process, however it dies. Never delete a lock file by hand; there is no
      need.
    - On a file system without ``flock`` locks do nothing: a warning says so.
    - A Parquet file appears under its name when the ``with`` block ends, not when the last batch is
      written.
"""
