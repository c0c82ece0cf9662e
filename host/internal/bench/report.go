package bench

import (
	"fmt"
	"io"
	"slices"
)

// Spread is a median with the first and the third quartile.
type Spread struct {
	Low  float64 `json:"low"`
	Mid  float64 `json:"mid"`
	High float64 `json:"high"`
}

func spread(list []float64) Spread {
	s := slices.Sorted(slices.Values(list))
	n := len(s)
	return Spread{s[n/4], s[n/2], s[3*n/4]}
}

func (s Spread) String() string { return fmt.Sprintf("%.2f (%.2f to %.2f)", s.Mid, s.Low, s.High) }

// Row is one pass and its ceilings. Rates are medians in GB/s of page bytes.
type Row struct {
	Pages       string  `json:"pages"`
	Memory      string  `json:"memory"`
	Clients     int     `json:"clients"` // at the same time
	Files       string  `json:"files"`   // location of the files
	Route       string  `json:"route"`
	Compression string  `json:"compression"`
	Pass        string  `json:"pass"`
	Copy        float64 `json:"copy"`             // plain copy between pages and slots
	Plain       float64 `json:"plain,omitempty"`  // plain threads and files; 0 for a root in memory
	Ours        float64 `json:"ours"`             // rate of the host
	Ratio       Spread  `json:"ratio"`            // Ours divided by the smaller ceiling of its round
	Stored      float64 `json:"stored,omitempty"` // page bytes divided by the bytes in the root
	Gain        *Spread `json:"gain,omitempty"`   // Ours divided by the rate with compression off in the same round
	CPU         float64 `json:"cpu"`              // processor seconds per GB for Ours
	PlainCPU    float64 `json:"plain_cpu"`        // the same for the plain threads
	First       *Spread `json:"first,omitempty"`  // for a layer-wise load: time to the first layer as a part of the whole time
	FirstMS     float64 `json:"first_ms,omitempty"`
	WholeMS     float64 `json:"whole_ms,omitempty"`
}

// Write prints rows as a table in Markdown.
func Write(w io.Writer, rows []Row) error {
	if _, err := fmt.Fprint(w,
		"| pages | memory | clients | files in | route | compression | pass | copy alone | plain threads | ours | ratio | over off | stored | CPU s/GB |\n",
		"|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"); err != nil {
		return err
	}
	for _, r := range rows {
		plain, gain, cpu := "", "", fmt.Sprintf("%.3f", r.CPU)
		if r.Gain != nil {
			gain = r.Gain.String()
		}
		if r.Plain > 0 {
			plain, cpu = fmt.Sprintf("%.1f", r.Plain), fmt.Sprintf("%s / %.3f", cpu, r.PlainCPU)
		}
		if _, err := fmt.Fprintf(w, "| %s | %s | %d | %s | %s | %s | %s | %.1f | %s | %.1f | %s | %s | %.3f | %s |\n", r.Pages,
			r.Memory, r.Clients, r.Files, r.Route, r.Compression, r.Pass, r.Copy, plain, r.Ours, r.Ratio, gain, r.Stored, cpu); err != nil {
			return err
		}
	}
	for _, r := range rows {
		if r.First == nil {
			continue
		}
		if _, err := fmt.Fprintf(w,
			"\n%s, %s, %d clients, %s, %s: the first layer of all chunks after %.1f ms of %.1f ms, %.4f (%.4f to %.4f) of the whole\n",
			r.Pages, r.Memory, r.Clients, r.Files, r.Compression, r.FirstMS, r.WholeMS, r.First.Mid, r.First.Low, r.First.High); err != nil {
			return err
		}
	}
	return nil
}
