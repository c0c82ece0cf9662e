package catalog

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// At a start only namespaces get a number that have a piece in some root or are opened by a session. The others that
// roots hold are unregistered until then. Once all pieces have been found the roots forget the texts that are left; a
// session that opens such a namespace later has its text written again.

// Knows says whether a namespace has a number or a text.
func (c *Catalog) Knows(d kv.Digest) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byDigest[d] != nil || c.unregistered[d] != ""
}

// AddText adds a text that a root holds, or the reason why that cannot be read. Pieces of a namespace whose text is
// there and cannot be read are left alone; only those whose text is missing belong to nobody.
func (c *Catalog) AddText(d kv.Digest, text string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		delete(c.unregistered, d)
		c.unreadable[d] = err
		return
	}
	c.unregistered[d] = text
}

// resolve returns a namespace that some root holds, and gives it a number if it has none. c.mu is held.
func (c *Catalog) resolve(d kv.Digest) (*Namespace, error) {
	if ns := c.byDigest[d]; ns != nil {
		return ns, nil
	}
	text := c.unregistered[d]
	if err := c.unreadable[d]; err != nil && text == "" {
		return nil, err
	}
	if text == "" {
		return nil, fmt.Errorf("%w: digest %s", ErrUnknownNamespace, d)
	}
	ns, err := c.assignNumber(d, text)
	if err != nil {
		delete(c.unregistered, d) // it is not tried for each of its pieces, and the roots keep it
		c.unreadable[d] = err
		c.log.Warn("namespace left out", "namespace", d, "error", err)
	}
	return ns, err
}

// ForgetUnregistered removes the texts of namespaces that have no piece in any root. All pieces have been found. The
// caller holds Lock.
func (c *Catalog) ForgetUnregistered() {
	c.mu.Lock()
	texts := c.unregistered
	c.unregistered = map[kv.Digest]string{}
	c.mu.Unlock()
	for d := range texts {
		c.opt.Roots.Forget(pieceformat.NamespacesDir, d.String())
	}
}
