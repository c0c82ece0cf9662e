// Package artifact is a policy as registries keep it: an OCI image manifest that names the module and, where there is one, its
// minisign signature. It has the references that name such artifacts, and the local store that hosts start from without a
// network. Nothing here is trusted before its digest was compared with the one that a reference names.
package artifact
