package pathbench_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/transfer/pathbench"
)

var update = flag.Bool("update", false, "write the golden files")

func plotted() []pathbench.Row {
	row := func(pages, files, pass string, ours, low, mid, high float64) pathbench.Row {
		return pathbench.Row{Pages: pages, Memory: "H200", Files: files, Route: "staged", Through: "go", Pass: pass, Ours: ours,
			Ratio: pathbench.Spread{Low: low, Mid: mid, High: high}}
	}
	return []pathbench.Row{
		row("Llama", "memory:, page-locked memory", "store", 50.7, 1.07, 1.07, 1.09),
		row("Llama", "memory:, page-locked memory", "load, first", 48.8, 1.04, 1.04, 1.04),
		row("Llama", "/mnt/a<b&c, page cache", "store", 27, .73, .75, .76),
		row("Llama", "/mnt/a<b&c, page cache", "load, first", 25, .83, .85, .86),
		row("MLA", "memory:, page-locked memory", "store", 49.4, 1.33, 1.34, 1.35),
	}
}

// The chart of the ratios is the same for the same rows.
func TestPlotIsGolden(t *testing.T) {
	var b bytes.Buffer
	if err := pathbench.WriteSVG(&b, plotted()); err != nil {
		t.Fatal(err)
	}
	const file = "testdata/ratios.svg"
	if *update {
		if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, b.Bytes()) {
		t.Errorf("%s is not what is drawn now; run with -update and look at it:\n%s", file, b.String())
	}
}

// Whatever the rows say, the chart is XML, has a bar for each and no coordinate that is no number.
func TestPlotIsXML(t *testing.T) {
	together := plotted()[:2]
	for i := range together {
		together[i].Alone = []float64{49, 50}
	}
	for name, rows := range map[string][]pathbench.Row{"none": nil, "alone": plotted(), "together": together} {
		var b strings.Builder
		if err := pathbench.WriteSVG(&b, rows); err != nil {
			t.Fatal(err)
		}
		d := xml.NewDecoder(strings.NewReader(b.String()))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, b.String())
			}
		}
		if bars := strings.Count(b.String(), "<g><title>"); bars != len(rows) || strings.Contains(b.String(), "NaN") {
			t.Errorf("%s: %d bars of %d rows\n%s", name, bars, len(rows), b.String())
		}
	}
}
