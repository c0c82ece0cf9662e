package sim

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/config"
)

// Capacity is the size of a root: "10%" of a trace's unique chunks, "5000" chunks, or "64GiB".
type Capacity struct {
	text  string
	share *big.Rat // of the unique chunks
	count int64    // chunks
	bytes int64
	ratio float64 // how many times as many chunks it holds because they are compressed; 0: not
}

// String is the text from which the capacity was parsed.
func (c Capacity) String() string { return c.text }

// ParseCapacity parses a capacity.
func ParseCapacity(text string) (Capacity, error) {
	c := Capacity{text: text}
	bad := func() (Capacity, error) {
		return Capacity{}, fmt.Errorf("%w: %q: want a share such as 10%%, a number of chunks, or a size such as 64GiB",
			ErrCapacity, text)
	}
	if number, ok := strings.CutSuffix(text, "%"); ok {
		share, ok := new(big.Rat).SetString(number)
		if !ok || strings.ContainsAny(number, "/eE") || share.Sign() <= 0 {
			return bad()
		}
		c.share = share.Quo(share, big.NewRat(100, 1))
		return c, nil
	}
	var err error
	if strings.Trim(text, "0123456789") == "" {
		c.count, err = strconv.ParseInt(text, 10, 32)
	} else {
		c.bytes, err = config.ParseSize(text)
	}
	if err != nil || c.count+c.bytes < 1 {
		return bad()
	}
	return c, nil
}

// InBytes says whether the capacity is in bytes, so that its meaning depends on the size of a chunk.
func (c Capacity) InBytes() bool { return c.bytes > 0 }

// Compressed is the same room for chunks that are stored with a compression ratio: raw bytes by stored bytes, 1 or more.
func (c Capacity) Compressed(ratio float64) (Capacity, error) {
	if !(ratio >= 1 && ratio <= 100) {
		return c, fmt.Errorf("%w: compression ratio %g: want 1 to 100", ErrCapacity, ratio)
	}
	c.ratio = ratio
	return c, nil
}

// Chunks is the capacity in chunks of a workload. Shares are rounded down.
func (c Capacity) Chunks(w *Workload, chunkBytes int64) (int, error) {
	var n int64
	switch {
	case c.share != nil:
		exact := new(big.Rat).Mul(c.share, big.NewRat(int64(w.Unique()), 1))
		n = new(big.Int).Quo(exact.Num(), exact.Denom()).Int64()
	case c.bytes > 0:
		n = c.bytes / max(1, chunkBytes)
	default:
		n = c.count
	}
	if c.ratio > 1 {
		n = int64(min(float64(n)*c.ratio, math.MaxInt32))
	}
	if n < 1 {
		return 0, fmt.Errorf("%w: %s of %s is less than one chunk", ErrCapacity, c.text, w.Name)
	}
	return int(min(n, math.MaxInt32)), nil
}

// ParseChunkBytes parses the size of a chunk. It also returns it in units of 4 KiB, rounded up.
func ParseChunkBytes(text string) (bytes int64, units uint32, err error) {
	c, err := ParseCapacity(text)
	if err == nil && c.count > 0 {
		c.bytes = c.count
	}
	if err != nil || c.bytes <= 0 || c.bytes > 1<<40 {
		return 0, 0, fmt.Errorf("%w: chunk size %q: want a size such as 16MiB", ErrCapacity, text)
	}
	return c.bytes, uint32((c.bytes + abi.SizeUnit - 1) / abi.SizeUnit), nil
}
