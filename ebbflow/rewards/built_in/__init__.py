"""The rewards that come with Ebbflow: every file is one (``ebbflow.rewards``)."""
