package server

import (
	"fmt"
	"os"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// descriptors holds the files that a message has taken, by tag.
type descriptors map[uint64]*os.File

func (d descriptors) close() {
	for _, f := range d {
		f.Close()
	}
}

// giveDescriptor stores a received descriptor until a message names its tag.
func (c *clientMemory) giveDescriptor(tag uint64, f *os.File) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return ErrClosing
	case c.descriptors[tag] != nil:
		return fmt.Errorf("tag %d is taken", tag)
	case len(c.descriptors) >= c.limits.Descriptors:
		return fmt.Errorf("%d descriptors wait for a REGISTER already", len(c.descriptors))
	}
	if err := c.share.Take(budget.Descriptors, 1); err != nil {
		return err
	}
	c.descriptors[tag] = f
	return nil
}

// takeDescriptor removes a descriptor and returns it, or nil if none has this tag.
func (c *clientMemory) takeDescriptor(tag uint64) *os.File {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.descriptors[tag]
	if f != nil {
		delete(c.descriptors, tag)
		c.share.Give(budget.Descriptors, 1)
	}
	return f
}

// takeDescriptors removes and returns the descriptors that regions name. Tags without a descriptor are skipped.
func (c *clientMemory) takeDescriptors(regions []*proto.Region) descriptors {
	files := descriptors{}
	for _, r := range regions {
		if h, ok := r.GetHandle().(*proto.Region_Memfd); ok && files[h.Memfd] == nil {
			if f := c.takeDescriptor(h.Memfd); f != nil {
				files[h.Memfd] = f
			}
		}
	}
	return files
}

// closeDescriptors closes the descriptors that were not taken, and refuses further ones.
func (c *clientMemory) closeDescriptors() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, f := range c.descriptors {
		f.Close()
	}
	c.share.Give(budget.Descriptors, int64(len(c.descriptors)))
	c.descriptors = nil
}
