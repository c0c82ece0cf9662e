package budget

import (
	"container/list"
	"io"
	"sync"
)

// Connections are open connections of an interface for few clients, the one that was silent longest first. A client speaks as
// soon as it is connected. So when there are too many connections one is closed: of the client that has most of them, the one
// that was silent longest. Those that send nothing cannot keep others out, and a crowd cannot push out what another client has
// just sent.
type Connections struct {
	Of  string
	Max int // of them

	mu     sync.Mutex
	list   list.List // of connection
	closed uint64
}

type connection struct {
	io.Closer
	client string
}

// OfPassing are connections that bring descriptors: with its own, each has DescriptorFiles open at most. Engines that start
// together bring theirs together, and one whose connection is closed for another's would take the host for gone.
func OfPassing() *Connections {
	return newConnections("connections for descriptors", 1024, DescriptorFiles)
}

// DescriptorFiles is how many files a connection of the descriptor socket has open at most.
const DescriptorFiles = 3

// OfHTTP are the connections of the HTTP interface.
func OfHTTP() *Connections { return newConnections("HTTP connections", 64, 1) }

func newConnections(of string, most, files int64) *Connections {
	return &Connections{Of: of, Max: int(max(2, min(most, openFiles()/32/files)))}
}

// Add enters a client's connection, and makes room if there are too many.
func (d *Connections) Add(c io.Closer, client string) *list.Element {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.list.Len() >= d.Max {
		d.closed++
		d.list.Remove(d.displaced()).(connection).Close()
	}
	return d.list.PushBack(connection{c, client})
}

// displaced is the first connection of the client that has most.
func (d *Connections) displaced() *list.Element {
	count, first, most := map[string]int{}, map[string]*list.Element{}, ""
	for e := d.list.Front(); e != nil; e = e.Next() {
		client := e.Value.(connection).client
		if count[client]++; count[client] == 1 {
			first[client] = e
		}
		if count[client] > count[most] {
			most = client
		}
	}
	return first[most]
}

// Heard notes that a connection is not silent.
func (d *Connections) Heard(e *list.Element) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list.MoveToBack(e) // no effect if it was removed
}

func (d *Connections) Remove(e *list.Element) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list.Remove(e)
}

// Figures are how many there are and may be. Those that were closed for others count as refused.
func (d *Connections) Figures() Figures {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.list.Len()
	return Figures{Of: d.Of, Limit: int64(d.Max), Held: int64(n), Holders: n, Refused: d.closed}
}
