package sim

import (
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// WriteTable prints the results, one block per workload and figure.
func (o *Outcome) WriteTable(out io.Writer) error {
	g := o.grid
	var b strings.Builder
	for i, w := range g.Workloads {
		fmt.Fprintf(&b, "%s: %d requests, %d accesses to %d chunks\n\n", w.Name, w.Requests(), w.Accesses(), w.Unique())
		o.block(&b, i, "miss ratio", func(r *Result) string { return fmt.Sprintf("%.4f", r.MissRatio) })
		o.block(&b, i, "prefix hit ratio", func(r *Result) string { return fmt.Sprintf("%.4f", r.PrefixHitRatio) })
		if g.Options.Prefill.TokensPerSecond > 0 {
			title := fmt.Sprintf("prefill saved, of %s", seconds(o.At(i, 0, 0).RecomputeSeconds))
			o.block(&b, i, title, func(r *Result) string { return fmt.Sprintf("%.2f %%", 100*r.SavedRatio) })
		}
		o.block(&b, i, "M accesses/s in the policy loop", func(r *Result) string {
			return fmt.Sprintf("%.1f",
				r.AccessesPerSecond/1e6)
		})
		for j := range g.Policies {
			for k := range g.Capacities {
				if r := o.At(i, j, k); r.Shed > 0 {
					fmt.Fprintf(&b, "%s at %s: %d chunks were not stored because the policy freed too little\n",
						g.Policies[j].Label, g.Capacities[k], r.Shed)
				}
			}
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// seconds has three digits at least, because two policies may save nearly the same.
func seconds(s float64) string {
	decimals := 0
	for least := 100.0; s != 0 && math.Abs(s) < least && decimals < 9; least /= 10 {
		decimals++
	}
	return strconv.FormatFloat(s, 'f', decimals, 64) + " s"
}

// WriteCSV prints a slice of results: a column for each value, named as in JSON, with dots before what is within.
func WriteCSV(out io.Writer, results any) error {
	w, rows := csv.NewWriter(out), reflect.ValueOf(results)
	for i := range rows.Len() {
		var names, values []string
		var add func(name string, v reflect.Value)
		add = func(name string, v reflect.Value) {
			switch v.Kind() {
			case reflect.Struct:
				for j := range v.NumField() {
					add(name+"."+v.Type().Field(j).Tag.Get("json"), v.Field(j))
				}
			case reflect.Slice:
				for j := range v.Len() {
					add(name+"."+strconv.Itoa(j), v.Index(j))
				}
			default:
				names, values = append(names, name[1:]), append(values, fmt.Sprint(v))
			}
		}
		if add("", rows.Index(i)); i == 0 {
			w.Write(names) // Flush keeps the error
		}
		w.Write(values)
	}
	w.Flush()
	return w.Error()
}

// block is one table: a row per policy, a column per capacity.
func (o *Outcome) block(b *strings.Builder, workload int, title string, cell func(*Result) string) {
	g := o.grid
	rows := [][]string{{title}}
	for _, c := range g.Capacities {
		rows[0] = append(rows[0], c.String())
	}
	for j, p := range g.Policies {
		row := []string{p.Label}
		for k := range g.Capacities {
			row = append(row, cell(o.At(workload, j, k)))
		}
		rows = append(rows, row)
	}
	align(b, rows)
}

// align writes rows in columns, and an empty line.
func align(b *strings.Builder, rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, text := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
	}
	for _, row := range rows {
		for i, text := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(text))
			if i == 0 {
				b.WriteString(text + pad)
			} else {
				b.WriteString("  " + pad + text)
			}
		}
		b.WriteByte('\n')
	}
	b.WriteByte('\n')
}
