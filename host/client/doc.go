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
// If a request has to wait, its lookup can set [LookupRequest.Prefetch]. A host with levels then copies the hits to the
// nearest level. [Lookup.Levels] returns where they were found.
//
// A load can be layer-wise ([LoadOptions]). Jobs can be ordered with the client's computation by timeline semaphores in
// shared memory ([Timeline]). The semaphores advance even if a job fails or the host dies.
//
// When the host goes away, every outstanding call and job ends with [ErrHostGone], and the caller may connect again. A
// context ends only the waiting. The job keeps running, and the host may touch its blocks, until Wait returns without a
// context error or Cancel returns.
package client
