package metamorphic

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// runRush lets clients work at the same time, beside a change of policy, and looks at the disk meanwhile.
func (n *node) runRush(op Op) (string, error) {
	for _, o := range n.r.nodes {
		if o.store == nil {
			return "a host is closed", nil
		}
	}
	n.letGo()
	stop := make(chan struct{})
	var watch, clients sync.WaitGroup
	watch.Go(func() { n.watchDisk(stop) })
	for text := range strings.SplitSeq(op.get("clients"), "+") {
		id, _, _ := strings.Cut(text, ":")
		_, seed, _ := parsePair("0" + strings.TrimPrefix(text, id))
		if i := n.r.h.host(id); i >= 0 {
			clients.Go(func() { n.r.nodes[i].client(rand.New(rand.NewPCG(seed, 2))) })
		}
	}
	clients.Go(func() {
		if _, err := n.swap(abi.RoleEvict, op.get("swap")); err != nil {
			n.r.report(fmt.Errorf("host %s: changing the evict policy: %w", n.ID, err))
		}
	})
	clients.Wait()
	close(stop)
	watch.Wait()
	return "", nil
}

// watchDisk checks that roots keep within their capacity, and lets hosts make steps, until it is stopped.
func (n *node) watchDisk(stop <-chan struct{}) {
	for {
		for i, root := range n.cfg.Roots {
			disk, err := n.r.frozenDisk(i)
			if err == nil && disk > root.Capacity {
				err = fmt.Errorf("root %d: %d bytes on disk, of %d", i, disk, root.Capacity)
			}
			if err != nil {
				n.r.report(err)
				return
			}
		}
		select {
		case <-stop:
			return
		default:
		}
		if n.r.h.Kind.hosts > 1 {
			n.turn()
		}
	}
}

// client stores, loads and gives up at random.
func (n *node) client(rng *rand.Rand) {
	g := &generator{rng: rng}
	for range 30 {
		switch k := rng.IntN(10); {
		case k < 5:
			n.storeEntry(g.entry())
		case k < 9:
			l, err := n.lookup(g.entry(), 3, 0)
			if err != nil {
				n.r.report(err)
				return
			}
			n.loadAll(l, g.ranks(3))
			l.Release()
		default:
			if p, err := n.begin(g.piece()); err == nil {
				_ = p.write() // it is given up all the same
				p.Abort(errAborted)
			}
		}
	}
}

// runDamage changes a piece's file behind the stores' back.
func (n *node) runDamage(op Op) (string, error) {
	files, err := n.pieceFiles()
	if err != nil || len(files) == 0 {
		return "no file", err
	}
	name := files[op.number("file")%uint64(len(files))]
	if err := n.noteDamage(name); err != nil {
		return "", err
	}
	if filepath.Base(filepath.Dir(name)) == colliderDir {
		return "left alone", nil // without its header it is a foreign file, and without it another key's takes the name
	}
	at := int64(op.number("at"))
	switch op.get("how") {
	case "remove":
		err = os.Remove(name)
	case "cut":
		err = os.Truncate(name, at)
	default:
		err = overwrite(name, at, uint32(op.number("bytes")))
	}
	rel, _ := filepath.Rel(n.dir, name)
	return rel, err
}

// noteDamage tells the model whose file is about to be damaged.
func (n *node) noteDamage(name string) error {
	b, err := os.ReadFile(name)
	if err != nil || len(b) < pieceformat.Page {
		return err
	}
	h, err := pieceformat.DecodeHeader(b[:pieceformat.Page])
	if err != nil {
		return nil // it was damaged before
	}
	for space := range namespaces {
		for key := range uint64(numKeys) {
			if namespaces[space].Digest() == h.Namespace && keyOf(key) == h.Key {
				n.r.model.setDamaged(Entry{space, key}, true)
			}
		}
	}
	return nil
}

// overwrite overwrites four bytes of a file, the last four where at is beyond them.
func overwrite(name string, at int64, value uint32) error {
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		b := []byte{byte(value), byte(value >> 8), byte(value >> 16), byte(value >> 24)}
		_, err = f.WriteAt(b, max(0, min(at, info.Size()-int64(len(b)))))
	}
	return errors.Join(err, f.Close())
}

// pieceFiles lists the files that hold pieces, by path.
func (n *node) pieceFiles() (names []string, err error) {
	for _, root := range n.cfg.Roots {
		err := filepath.WalkDir(root.Path, func(name string, e os.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err != nil:
				return err
			case e.IsDir() && strings.HasPrefix(e.Name(), "."):
				return fs.SkipDir
			case !e.IsDir() && !isTemporary(e):
				names = append(names, name)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return names, nil
}
