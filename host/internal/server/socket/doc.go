// Package socket creates the two Unix sockets of a host, one for sessions and one for descriptors. A lock file reserves their
// path for one process. Sockets that a dead process left behind are replaced. Only the host's own user, root and the configured
// users can connect.
//
// [Rules] define the users of a tenant, the visibility of its entries, and the calls that are reserved for the operator.
// [Arriving] bounds the data of a connection before a session takes it.
package socket
