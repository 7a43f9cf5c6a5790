"""Many processes: which engine started them, how they find one another, and what ends them together.

Clusters start, place and restart processes by engines of their own. This wing reads what such an engine tells
(`engines`), joins the processes and sees that none outlives or waits for a dead one (`joined`) or runs
something else (`agreed`), starts some here (`local`), and writes the files that hand a job over (`jobs`).
"""
