// Package socket makes the two Unix sockets of a host: one for sessions, and one beside it for descriptors. A lock file
// makes their path belong to one process; sockets that a dead process left behind are replaced. Only this user, root
// and those that the operator names can connect.
package socket
