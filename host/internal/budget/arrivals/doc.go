// Package arrivals bounds the memory that a gRPC connection makes a host hold: messages until a handler has read them, calls, and answers
// until they are written. [Effort] bounds the processor time of what arrives.
package arrivals
