package nixl

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Constants of the header.
const (
	dram       = 0
	opRead     = 0
	syncByRW   = 2
	backend    = "UCX"
	workersKey = "num_workers"
	workerKey  = "worker_id="
)

// progressMicroseconds is the longest time between two runs of UCX's work by the agent's thread. An event wakes the
// thread earlier.
const progressMicroseconds = 100_000

// config is nixl_capi_agent_config_t.
type config struct {
	progressThread, listenThread   bool
	listenPort, sync               int32
	workers                        uint32
	progressDelay, listenDelayUsec uint64
	telemetry                      bool
}

// Agent is this process as a peer of other agents. It is safe for concurrent use.
type Agent struct {
	lib  *Library
	name string
	made atomic.Uint64 // number of registrations since the start

	mu      sync.RWMutex // read-locked by each call, locked by Close
	agent   uintptr      // 0: closed
	backend uintptr
	workers []worker
	next    atomic.Uint32

	readsMu sync.Mutex
	reads   map[*Read]bool // reads that have not ended

	regions struct {
		sync.RWMutex
		list []region // by address
	}
}

type region struct{ from, to uintptr }

// worker is a worker of UCX, which has a spin lock. If the processor copies, the holder of that lock copies, so other
// threads must not spin on it.
type worker struct {
	sync.Mutex
	options uintptr // options of a request to the worker
}

// Agent makes an agent with a UCX backend and a number of workers. If the processor copies, each worker moves one read
// at a time. The name must differ from those of all agents that it meets.
func (l *Library) Agent(name string, workers int) (*Agent, error) {
	a := &Agent{lib: l, name: name, reads: map[*Read]bool{}, workers: make([]worker, workers)}
	c := config{progressThread: true, sync: syncByRW, workers: uint32(workers), progressDelay: progressMicroseconds}
	if err := l.do(createAgent, uintptr(text(name)), uintptr(unsafe.Pointer(&c)), uintptr(unsafe.Pointer(&a.agent))); err != nil {
		return nil, err
	}
	var params uintptr
	err := l.do(createParams, uintptr(unsafe.Pointer(&params)))
	if err == nil {
		err = l.do(addParam, params, uintptr(text(workersKey)), uintptr(text(strconv.Itoa(workers))))
	}
	if err == nil {
		err = l.do(createBackend, a.agent, uintptr(text(backend)), params, uintptr(unsafe.Pointer(&a.backend)))
	}
	if params != 0 {
		err = errors.Join(err, l.do(destroyParams, params))
	}
	for i := range workers {
		var options uintptr
		id := workerKey + strconv.Itoa(i)
		if err == nil {
			err = l.do(createOptions, uintptr(unsafe.Pointer(&options)))
		}
		if err == nil {
			a.workers[i].options = options
			err = l.do(setCustom, options, uintptr(text(id)), uintptr(len(id)))
		}
	}
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// Name returns the agent's name.
func (a *Agent) Name() string { return a.name }

// Close ends the agent and all running reads. Their destinations are not written to any more, and registered memory
// belongs to the caller alone again.
func (a *Agent) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.agent == 0 {
		return nil
	}
	var errs []error
	for r := range a.reads {
		for _, request := range r.requests {
			errs = append(errs, r.release(request))
		}
	}
	clear(a.reads)
	errs = append(errs, a.lib.do(destroyAgent, a.agent))
	if a.backend != 0 { // frees the handle only: the backend belonged to the agent
		errs = append(errs, a.lib.do(destroyBackend, a.backend))
	}
	for i := range a.workers {
		if w := &a.workers[i]; w.options != 0 {
			errs = append(errs, a.lib.do(destroyOptions, w.options))
		}
	}
	a.agent, a.backend = 0, 0
	return errors.Join(errs...)
}

// enter holds the agent open until leave.
func (a *Agent) enter() error {
	a.mu.RLock()
	if a.agent == 0 {
		a.mu.RUnlock()
		return ErrClosed
	}
	return nil
}

func (a *Agent) leave() { a.mu.RUnlock() }

// Register lets other agents read and write memory, and this agent use it for its own reads. The memory must not be
// Go's.
func (a *Agent) Register(mem []byte) error {
	if err := a.registration(registerMemory, mem); err != nil {
		return err
	}
	r := &a.regions
	r.Lock()
	defer r.Unlock()
	at := address(mem)
	i, _ := slices.BinarySearchFunc(r.list, at, byAddress)
	r.list = slices.Insert(r.list, i, region{at, at + uintptr(len(mem))})
	a.made.Add(1)
	return nil
}

func byAddress(r region, at uintptr) int { return cmp.Compare(r.from, at) }

// Unregister ends a registration. Reads of that memory by others fail from then on. After Close it has no effect.
func (a *Agent) Unregister(mem []byte) error {
	r := &a.regions
	r.Lock()
	if i, ok := slices.BinarySearchFunc(r.list, address(mem), byAddress); ok {
		r.list = slices.Delete(r.list, i, i+1)
	}
	r.Unlock()
	if err := a.registration(deregisterMemory, mem); !errors.Is(err, ErrClosed) {
		return err
	}
	return nil
}

// Has reports whether memory is registered by one registration.
func (a *Agent) Has(mem []byte) bool {
	r := &a.regions
	r.RLock()
	defer r.RUnlock()
	at := address(mem)
	i, exact := slices.BinarySearchFunc(r.list, at, byAddress)
	if !exact {
		i--
	}
	return i >= 0 && i < len(r.list) && at+uintptr(len(mem)) <= r.list[i].to
}

// Generation changes with each registration. A peer with metadata of an older generation cannot read newer
// registrations.
func (a *Agent) Generation() uint64 { return a.made.Load() }

func address(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }

func (a *Agent) registration(c call, mem []byte) error {
	if err := a.enter(); err != nil {
		return err
	}
	defer a.leave()
	l := a.lib
	var list uintptr
	if err := l.do(createRegistration, dram, uintptr(unsafe.Pointer(&list))); err != nil {
		return err
	}
	err := l.do(addRegistration, list, address(mem), uintptr(len(mem)), 0, 0, 0)
	if err == nil {
		err = l.do(c, a.agent, list, 0)
	}
	return errors.Join(err, l.do(destroyRegistration, list))
}

// Metadata returns the description that other agents need to read the registered memory.
func (a *Agent) Metadata() ([]byte, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	var data unsafe.Pointer
	var n uintptr
	if err := a.lib.do(localMetadata, a.agent, uintptr(unsafe.Pointer(&data)), uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	defer purego.SyscallN(a.lib.free, uintptr(data))
	return bytes.Clone(unsafe.Slice((*byte)(data), n)), nil
}

// Load loads another agent's metadata, or additions to it.
func (a *Agent) Load(name string, metadata []byte) error {
	if err := a.enter(); err != nil {
		return err
	}
	defer a.leave()
	if len(metadata) == 0 {
		return fmt.Errorf("%w: none", ErrMetadata)
	}
	if got, ok := nameIn(metadata); ok && got != name { // NIXL would load it for another agent
		return fmt.Errorf("%w: of %q, want %q", ErrMetadata, got, name)
	}
	var said unsafe.Pointer
	if err := a.lib.do(loadRemote, a.agent, uintptr(unsafe.Pointer(&metadata[0])), uintptr(len(metadata)), uintptr(unsafe.Pointer(&said))); err != nil {
		return fmt.Errorf("%w: %w", ErrMetadata, err)
	}
	defer purego.SyscallN(a.lib.free, uintptr(said))
	if got := gostring(said); got != name {
		return fmt.Errorf("%w: of %q, want %q", ErrMetadata, got, name)
	}
	return nil
}

// nameIn returns the name in metadata, which begins with two tags, the name's length in eight bytes, and the name.
func nameIn(metadata []byte) (name string, ok bool) {
	rest, ok := bytes.CutPrefix(metadata, []byte("nixlSerDes|Agent"))
	if !ok || len(rest) < 8 {
		return "", false
	}
	n, rest := binary.NativeEndian.Uint64(rest), rest[8:]
	return string(rest[:min(n, uint64(len(rest)))]), true
}

func gostring(p unsafe.Pointer) string {
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// Forget removes another agent's metadata. No read from it may be running, since NIXL would not report its end any
// more.
func (a *Agent) Forget(name string) error {
	if err := a.enter(); err != nil {
		return err
	}
	defer a.leave()
	return a.lib.do(invalidateRemote, a.agent, uintptr(text(name)))
}

// Part is memory of another agent.
type Part struct {
	Address uint64
	Bytes   int64
}

// Read is one read of another agent's memory, for one goroutine at a time.
type Read struct {
	agent    *Agent
	worker   *worker
	requests []uintptr // one for each part that has not ended
	err      error
}

// Read begins to read parts of another agent's memory, one after the other, to registered memory of the same length.
// With an error no read has begun. A refusal by UCX is the error of the returned read instead, since NIXL does not say
// which parts have begun.
func (a *Agent) Read(dst []byte, from string, parts []Part) (*Read, error) {
	left := int64(len(dst))
	for _, p := range parts {
		if left -= p.Bytes; p.Bytes <= 0 || left < 0 {
			break
		}
	}
	if left != 0 || len(dst) == 0 {
		return nil, fmt.Errorf("%w: %d bytes do not take what is to be read", ErrLength, len(dst))
	}
	if !a.Has(dst) {
		return nil, fmt.Errorf("%w: %d bytes to read to", ErrUnregistered, len(dst))
	}
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	r := &Read{agent: a, requests: make([]uintptr, 0, len(parts)), worker: a.take()}
	defer r.worker.Unlock()
	for _, p := range parts {
		if err := r.begin(dst[:p.Bytes], from, p.Address); err != nil {
			if len(r.requests) == 0 {
				return nil, err
			}
			r.err = err // parts that were begun are waited for
			break
		}
		dst = dst[p.Bytes:]
	}
	a.readsMu.Lock()
	a.reads[r] = true
	a.readsMu.Unlock()
	return r, nil
}

// take locks a worker, if possible one that is not busy.
func (a *Agent) take() *worker {
	at := int(a.next.Add(1) % uint32(len(a.workers)))
	for i := range a.workers {
		if w := &a.workers[(at+i)%len(a.workers)]; w.TryLock() {
			return w
		}
	}
	a.workers[at].Lock()
	return &a.workers[at]
}

// begin posts the request for one part.
func (r *Read) begin(dst []byte, from string, at uint64) (err error) {
	l := r.agent.lib
	var lists [2]uintptr // local and remote
	defer func() {
		for _, list := range lists {
			if list != 0 {
				err = errors.Join(err, l.do(destroyList, list))
			}
		}
	}()
	for i, at := range [2]uintptr{address(dst), uintptr(at)} {
		if err := l.do(createList, dram, uintptr(unsafe.Pointer(&lists[i]))); err != nil {
			return err
		}
		if err := l.do(addToList, lists[i], at, uintptr(len(dst)), 0); err != nil {
			return err
		}
	}
	var request uintptr
	if err := l.do(createRequest, r.agent.agent, opRead, lists[0], lists[1], uintptr(text(from)), uintptr(unsafe.Pointer(&request)), r.worker.options); err != nil {
		return err
	}
	r.requests = append(r.requests, request)
	if s := l.status(postRequest, r.agent.agent, request, 0); s < 0 {
		return &Error{callNames[postRequest], s}
	}
	return nil
}

// Done reports whether the read has ended, with its error. A read that has ended needs no further call.
func (r *Read) Done() (bool, error) {
	a := r.agent
	if err := a.enter(); err != nil {
		return true, err
	}
	defer a.leave()
	if !r.worker.TryLock() { // the worker is busy with another read
		return false, nil
	}
	defer r.worker.Unlock()
	for n := len(r.requests); n > 0; n-- {
		request := r.requests[n-1]
		s := a.lib.status(requestStatus, a.agent, request)
		if s == inProgress {
			return false, nil
		}
		if s != 0 && r.err == nil {
			r.err = &Error{callNames[requestStatus], s}
		}
		r.requests = r.requests[:n-1]
		if err := r.release(request); err != nil && r.err == nil {
			r.err = err
		}
	}
	a.readsMu.Lock()
	delete(a.reads, r)
	a.readsMu.Unlock()
	return true, r.err
}

// release frees a request. If it has not ended, it is cancelled as far as UCX can.
func (r *Read) release(request uintptr) error {
	return errors.Join(r.agent.lib.do(releaseRequest, r.agent.agent, request), r.agent.lib.do(destroyRequest, request))
}
