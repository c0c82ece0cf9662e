// Package arrivals bounds what a connection of gRPC makes a host hold: what arrives before a handler has read it, calls, and answers until they
// are written.
package arrivals
