package sim

import (
	"fmt"
	"math/big"
	"strconv"
)

// Warmup is how many requests fill a cache before anything is counted: a share of them or a number. The zero value is none.
type Warmup struct {
	text  string
	share *big.Rat // of the requests
	count int
}

// ParseWarmup reads "10%" or "5000". Empty is none.
func ParseWarmup(text string) (Warmup, error) {
	if text == "" {
		return Warmup{}, nil
	}
	if n, err := strconv.Atoi(text); err == nil && n >= 0 {
		return Warmup{text: text, count: n}, nil
	}
	c, err := ParseCapacity(text)
	if err != nil || c.share == nil {
		return Warmup{}, fmt.Errorf("%w: %q: want a share of the requests such as 10%%, or their number", ErrWarmup, text)
	}
	return Warmup{text: text, share: c.share}, nil
}

// Requests is the number of a workload's requests that do not count. Shares are rounded down.
func (u Warmup) Requests(w *Workload) (int, error) {
	n := u.count
	if u.share != nil {
		exact := new(big.Rat).Mul(u.share, big.NewRat(int64(w.Requests()), 1))
		if whole := new(big.Int).Quo(exact.Num(), exact.Denom()); whole.IsInt64() {
			n = int(min(whole.Int64(), int64(w.Requests())))
		} else {
			n = w.Requests()
		}
	}
	if n >= w.Requests() || w.accessesFrom(n) == 0 {
		return 0, fmt.Errorf("%w: %s leaves nothing of the %d requests of %s to count", ErrWarmup, u.text, w.Requests(), w.Name)
	}
	return n, nil
}
