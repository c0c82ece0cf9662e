// Package share is what one session holds of what a host has a bounded amount of: memory, file descriptors, and room for
// stores that wait. Clients name the sizes of messages and tables, so all that they make the host hold is estimated here.
package share
