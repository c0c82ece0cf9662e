// Package socket makes the two Unix sockets of a host: one for sessions, and one for descriptors. A lock file
// makes their path belong to one process; sockets that a dead process left behind are replaced. Only this user, root
// and those that the operator names can connect.
//
// Rules say who may do what on them: which users a tenant has, what others see of it, and what is for the operator only. What
// arrives on a connection is bounded before a session has it.
package socket
