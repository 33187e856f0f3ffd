"""Preferences of people: a local page on which raters compare pictures, and what follows from
their answers.

Where it fits
    Near the top: it reads the tables that evaluations and offline stages leave in a run's folder.
    The command line starts it; no task does, because a run does not wait for a page.

Why
    A reward and its guardrails are programs, and a policy can learn to please programs. Before a
    champion is replaced, people can look at the pictures, without knowing which policy drew which.

How
    - ``sources``: pairs of pictures from two evaluations (champion and candidate), or from the
      rollouts of one policy.
    - ``answers``: an append-only file with every answer; an answer that was acknowledged is on the
      disk.
    - ``session``: which pair a rater sees next and on which sides, when there are enough answers.
    - ``sequential``: the test of "the candidate is preferred" that may be looked at after every
      answer.
    - ``agreement``: how far raters agree, beyond chance.
    - ``results``: the pairs file that an offline stage trains on, and the evidence for an approval.
    - ``server``: the page over HTTP, for this machine by default.

Gotchas
    - Raters are blind: no address, order or text that the page gets may depend on which picture is
      the candidate's.
    - Two answers on one pair are not independent. The test counts the first answer on each pair
      only.
    - Pairs on prompts that a run is evaluated on are left out when it imports them: train on pairs
      of rollouts.
"""
