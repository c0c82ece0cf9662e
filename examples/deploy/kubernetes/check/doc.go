// Package check has the sources of a command that renders the Helm chart and judges it: every object is decoded strictly
// into the types of Kubernetes, the parts of each fit together, and the plain manifests are what the chart gives with its
// defaults. `make .build/bin/check-kubernetes` builds it, with the requirements of check.mod, so that kvhost does not depend
// on Kubernetes.
package check
