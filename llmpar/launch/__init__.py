"""Many processes: which engine started them, how they find one another, and what ends them together.

Clusters start, place and restart processes by engines of their own. This folder reads the variables that such
an engine sets (`engines`), joins the processes, ends all when one ends (`joined`) and compares their settings
(`agreed`), starts processes on this machine (`local`), and writes job files (`jobs`).
"""
