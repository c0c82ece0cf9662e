// Package client talks to the kvhost of this node.
//
// A [Session] is one stream to the host, and every method is one message on it, so any number of goroutines may use
// a session at once. Memory is shared, never copied through the socket: an [Arena] is a sealed memfd that both
// processes map, and stores and loads name blocks in it.
//
//	s, err := client.Dial(ctx, client.Hello{Socket: path, Engine: "e1", LocalRanks: 1, Namespace: ns})
//	arena, err := s.NewArena(size)
//	_, err = s.Register(ctx, group, arena, planes)
//	hit, err := s.Lookup(ctx, client.LookupRequest{Request: 1, Group: group, Keys: keys})
//	job, err := s.Load(ctx, hit, chunks, client.LoadOptions{})
//	result, err := job.Wait(ctx)
//
// A request that has to wait can be looked up with [LookupRequest.Prefetch]: on a host with levels its hits come to the
// nearest one, and [Lookup.Levels] says where they were.
//
// A load can be layer-wise ([LoadOptions]). Jobs can be ordered with the client's compute by timeline semaphores in
// shared memory ([Timeline]), which are advanced even when a job fails or the host dies.
//
// When the host goes away, every outstanding call and job ends with [ErrHostGone]; reconnecting is up to the caller.
// A context ends the waiting only: the job keeps running, and the host may touch its blocks, until Wait returns
// without a context error or Cancel returns.
package client
