package server

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// What storage and devices do wrong has a code of its own: INTERNAL is for what is a mistake of the host's.
func TestCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want proto.Code
	}{
		{kv.ErrChecksum, proto.Code_CODE_DAMAGED},
		{transfer.ErrDamaged, proto.Code_CODE_DAMAGED},
		{store.ErrGone, proto.Code_CODE_DAMAGED},
		{transfer.ErrDevice, proto.Code_CODE_IO},
		{&staging.HungError{Op: staging.OpRead}, proto.Code_CODE_IO},
		{&gds.HungError{}, proto.Code_CODE_IO},
		{store.ErrRootOut, proto.Code_CODE_IO},
		{&fs.PathError{Op: "read", Err: errors.New("input/output error")}, proto.Code_CODE_IO},
		{transfer.ErrCancelled, proto.Code_CODE_CANCELLED},
		{transfer.ErrBlocks, proto.Code_CODE_INVALID},
		{transfer.ErrClosed, proto.Code_CODE_CLOSING},
		{errors.New("a bug"), proto.Code_CODE_INTERNAL},
	} {
		if got := codeOf(fmt.Errorf("chunk 3: %w", c.err)); got != c.want {
			t.Errorf("code of %v: got %s, want %s", c.err, got, c.want)
		}
	}
}
