package shared

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Control files, which are objects in a bucket, contain a checksum followed by JSON. Each has one writer at a time.

// A file or an object of another host is read up to these sizes. A longer one is damaged.
const (
	allStatuses  = 32 << 20 // of all members together: see mostStatus
	mostRecord   = 4 << 20  // the evictor's object: a grant of each member, and the decisions of mostBatches batches
	mostBatch    = 64 << 20 // victims may have long names
	mostDecision = 64 << 10
	mostGrant    = 4 << 10 // a grant or the evictor's heartbeat
	mostLog      = 8 << 20 // a member's log in a bucket: see partBytes
)

const (
	controlMagic = "kvshare1 "
	controlHead  = len(controlMagic) + 16 + 1
)

// EncodeControl returns the content of a control file.
func EncodeControl(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return append(fmt.Appendf(nil, "%s%016x\n", controlMagic, xxh3.Hash(text)), text...), nil
}

// DecodeControl decodes the content of a control file. It returns ErrDamaged if the checksum does not match.
func DecodeControl(b []byte, v any) error {
	if len(b) < controlHead || string(b[:len(controlMagic)]) != controlMagic {
		return fmt.Errorf("%w: no heading", ErrDamaged)
	}
	head, text := b[:controlHead], b[controlHead:]
	if want := fmt.Appendf(nil, "%s%016x\n", controlMagic, xxh3.Hash(text)); !bytes.Equal(head, want) {
		return fmt.Errorf("%w: its checksum", ErrDamaged)
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}
