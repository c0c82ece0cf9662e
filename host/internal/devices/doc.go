// Package devices takes a machine's GPUs into use and decides, for each GPU and root, how pieces move: directly by
// cuFile or through staging memory. It also holds the memory of roots in memory. What does not work is staged, so nothing here keeps a host from starting.
package devices
