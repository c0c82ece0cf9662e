// Package client talks to a kvhost on this machine.
//
// The one idea: a [Session] is one stream to the host, and every method is one message on it, so any number of
// goroutines may use a session at once. Memory is shared, never copied through the socket: an [Arena] is a sealed
// memfd that both processes map, and stores and loads name blocks in it.
//
//	s, err := client.Dial(ctx, client.Hello{Socket: path, Engine: "e1", LocalRanks: 1, Namespace: ns})
//	arena, err := s.NewArena(size)
//	_, err = s.Register(ctx, group, arena, planes)
//	hit, err := s.Lookup(ctx, client.LookupRequest{Request: 1, Group: group, Keys: keys})
//	job, err := s.Load(ctx, hit, chunks, client.LoadOptions{})
//	result, err := job.Wait(ctx)
//
// A load can be layer-wise ([LoadOptions]), and jobs can be put in order with the client's compute by semaphores in
// shared memory ([Timeline]), which are advanced also when a job fails and when the host dies.
//
// When the host goes away every outstanding call and job ends with [ErrHostGone]; connecting again is the caller's
// business. A context that ends only ends the waiting: a job goes on, and its blocks are the host's, until its Wait
// returns without a context error or its Cancel has returned.
package client
