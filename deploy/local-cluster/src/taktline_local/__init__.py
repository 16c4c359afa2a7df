"""A test and demo device: runs Pod specs as local processes, against a real Kubernetes API or without any.

It isolates nothing: no containers, no images, no cgroups, no network namespaces. Never run it in production, and never
let it run a Pod that you would not run as yourself. `docs/local-cluster.md` lists what it does and what it leaves out.
"""

DEVICE_NOTICE = "test and demo device: Pods run as plain local processes, without images, isolation or resource limits"
"""One sentence that the node, its log and `taktline up` show to whoever runs them."""
