package policy

import (
	"bytes"
	"math/rand/v2"
	"sync"

	"github.com/kvhost/kvhost/abi"
)

// given are paths that a place policy gave, drawn evenly from all that it ever gave. They show one that gives others
// after a while: to ask twice in a row would not.
type given struct {
	mu    sync.Mutex
	paths []givenPath

	copies sync.Pool // of *givenPath
}

type givenPath struct {
	query abi.PlaceQuery
	path  []byte
}

func (p *givenPath) set(q *abi.PlaceQuery, path []byte) {
	p.query, p.path = *q, append(p.path[:0], path...)
}

func (p *givenPath) clone() givenPath { return givenPath{p.query, bytes.Clone(p.path)} }

// remembered is how many paths are kept. A policy that changed the names of a twentieth of all pieces is found out by
// them in 24 of 25 cases.
const remembered = 64

// drawnOf is among how many paths one may be kept, once there are enough: to draw takes as long as half a path.
const drawnOf = 16

// note may keep a path, the n-th that was given.
func (g *given) note(n uint64, q *abi.PlaceQuery, path []byte) {
	at := n
	if n >= remembered {
		if n%drawnOf != 0 {
			return
		}
		if at = rand.Uint64N(n/drawnOf + remembered); at >= remembered {
			return
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if at >= uint64(len(g.paths)) {
		if len(g.paths) == remembered {
			return
		}
		at = uint64(len(g.paths))
		g.paths = append(g.paths, givenPath{})
	}
	g.paths[at].set(q, path)
}

// all are those kept.
func (g *given) all() (list []givenPath) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range g.paths {
		list = append(list, g.paths[i].clone())
	}
	return list
}

// one is a copy of one of them, which goes back to copies, or nil.
func (g *given) one() *givenPath {
	p, _ := g.copies.Get().(*givenPath)
	if p == nil {
		p = &givenPath{path: make([]byte, 0, 2*maxPathBytes)} // with room for another path behind it
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.paths) == 0 {
		g.copies.Put(p)
		return nil
	}
	from := &g.paths[rand.IntN(len(g.paths))]
	p.set(&from.query, from.path)
	return p
}

// forget drops all: an id means another namespace now.
func (g *given) forget() {
	g.mu.Lock()
	g.paths = nil
	g.mu.Unlock()
}
