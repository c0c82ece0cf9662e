package budget

import (
	"container/list"
	"io"
	"sync"
)

// Connections limits the open connections of an interface for few clients. A client sends its request as soon as it is
// connected. If there are too many connections, the client with the most loses the one that was silent longest. Clients that
// send nothing can therefore not keep others out, and a client with many connections cannot displace a request that another
// client has just sent. The list begins with the connection that was silent longest.
type Connections struct {
	Of  string
	Max int // most open connections

	mu     sync.Mutex
	list   list.List // of connection
	closed uint64
}

type connection struct {
	io.Closer
	client string
}

// OfPassing returns the limit for connections that bring descriptors. Each has at most DescriptorFiles open files, including
// its own. The limit is high because engines that start together connect together, and an engine with a displaced connection
// would conclude that the host is gone.
func OfPassing() *Connections {
	return newConnections("connections for descriptors", 1024, DescriptorFiles)
}

// DescriptorFiles is the maximum number of open files of a connection of the descriptor socket.
const DescriptorFiles = 3

// OfHTTP returns the limit for connections of the HTTP interface.
func OfHTTP() *Connections { return newConnections("HTTP connections", 64, 1) }

func newConnections(of string, most, files int64) *Connections {
	return &Connections{Of: of, Max: int(max(2, min(most, openFiles()/32/files)))}
}

// Add enters a client's connection, and closes another one if there are too many.
func (d *Connections) Add(c io.Closer, client string) *list.Element {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.list.Len() >= d.Max {
		d.closed++
		d.list.Remove(d.displaced()).(connection).Close()
	}
	return d.list.PushBack(connection{c, client})
}

// displaced returns the connection that was silent longest, of the client with the most connections.
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

// Heard records that a connection has sent something.
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

// Figures returns the number of connections and their limit. Displaced connections count as refused.
func (d *Connections) Figures() Figures {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.list.Len()
	return Figures{Of: d.Of, Limit: int64(d.Max), Held: int64(n), Holders: n, Refused: d.closed}
}
