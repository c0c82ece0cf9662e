package trace

import (
	"encoding/json"
	"fmt"
	"math"

	"github.com/kvhost/kvhost/abi"
)

func parse(line []byte, req *Request) error {
	var l struct {
		Timestamp    *float64 `json:"timestamp"`
		InputLength  *float64 `json:"input_length"`
		OutputLength float64  `json:"output_length"`
		HashIDs      []uint64 `json:"hash_ids"`
		EndReason    string   `json:"end_reason"`
		Priority     int32    `json:"priority"`
		ReturnMS     float64  `json:"return_ms"`
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if l.HashIDs == nil {
		return fmt.Errorf("%w: no hash_ids", ErrFormat)
	}
	if len(l.HashIDs) > MaxIDs {
		return fmt.Errorf("%w: %d hash ids, at most %d", ErrBounds, len(l.HashIDs), MaxIDs)
	}
	req.HashIDs, req.Priority, req.EndReason = l.HashIDs, l.Priority, abi.ParseEndReason(l.EndReason)
	for _, f := range []struct {
		name string
		from *float64
		to   *int64
	}{
		{"timestamp", l.Timestamp, &req.Timestamp}, {"input_length", l.InputLength, &req.InputLength},
		{"output_length", &l.OutputLength, &req.OutputLength}, {"return_ms", &l.ReturnMS, &req.ReturnMS},
	} {
		if f.from == nil {
			return fmt.Errorf("%w: no %s", ErrFormat, f.name)
		}
		if n := *f.from; n < 0 || n >= 1<<53 {
			return fmt.Errorf("%w: %s is out of range", ErrFormat, f.name)
		}
		*f.to = int64(math.Round(*f.from)) // some traces have fractions of milliseconds
	}
	return nil
}
