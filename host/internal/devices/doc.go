// Package devices takes a machine's GPUs into use. For each GPU and root it decides how pieces move: directly by cuFile or through staging
// memory. It also holds the memory of roots in memory. If the direct route does not work, pieces are staged, so nothing here keeps a host
// from starting.
package devices
