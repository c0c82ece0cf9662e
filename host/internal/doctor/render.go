package doctor

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/s3fs"
)

// Write prints the report for people.
func (r *Report) Write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "kvhost check (%s)\n\n", r.Version)
	t := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	r.machine(t)
	for i := range r.Facts.GPUs {
		r.gpu(t, &r.Facts.GPUs[i])
	}
	for i := range r.Facts.Roots {
		r.root(t, &r.Facts.Roots[i], r.config.Roots[i].Capacity)
	}
	t.Flush()
	if len(r.Verdicts) > 0 {
		b.WriteString("\n")
		fmt.Fprintf(t, "FROM\tTO\tROUTE\tWHY\n")
		for _, v := range r.Verdicts {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", cmp.Or(v.GPU, "host memory"), v.Root, v.Route, v.Why)
			if v.Fix != "" {
				fmt.Fprintf(t, "\t\t\tfix: %s\n", v.Fix)
			}
		}
		t.Flush()
	}
	if len(r.Findings) > 0 {
		b.WriteString("\n")
		for _, f := range r.Findings {
			fmt.Fprintf(t, "%s\t%s: %s\n", f.Level, strings.TrimSuffix(f.About, ":"), f.Says)
			if f.Fix != "" {
				fmt.Fprintf(t, "\t%s: %s\n", fixes[f.Level], f.Fix)
			}
		}
		t.Flush()
	}
	for line := range strings.Lines(b.String()) { // tabwriter pads the cell before an empty one
		if _, err := io.WriteString(w, strings.TrimRight(line, " \n")+"\n"); err != nil {
			return err
		}
	}
	return nil
}

// fixes are the labels of a finding's advice by level. A note does not require a remedy.
var fixes = map[Level]string{Note: "better", Warning: "fix", Problem: "fix"}

func (r *Report) machine(w io.Writer) {
	m, d, c := &r.Facts.Machine, &r.Facts.Driver, &r.Facts.CuFile
	of := "of memory"
	if m.Group {
		of = "of memory for its control group"
	}
	fmt.Fprintf(w, "machine\tLinux %s, %s, %s, %s %s (%s available), %s\n", m.Kernel, m.Arch,
		count(m.CPUs, "CPU"), config.SizeText(m.MemoryBytes), of,
		config.SizeText(m.FreeBytes), count(m.Nodes, "NUMA node"))
	memlock := "no limit of locked memory"
	if m.Memlock >= 0 {
		memlock = config.SizeText(m.Memlock) + " of locked memory"
	}
	fmt.Fprintf(w, "limits\t%s, %d open files, %d huge pages of %s free\n", memlock, m.OpenFiles, m.HugePages,
		config.SizeText(m.HugePage))
	fmt.Fprintf(w, "staging\t%s of memory in %s\n", config.SizeText(r.config.Engine.MaxStagingMemory), m.pages(r.config.Engine.MaxStagingMemory))
	fmt.Fprintf(w, "kernel\tCONFIG_PCI_P2PDMA %s, nvidia-fs %s, udev database %s\n", m.P2PDMA,
		loaded(m.NVFS, "loaded"), loaded(m.Udev, "present"))
	switch {
	case d.Forbid:
		fmt.Fprintf(w, "driver\tnot probed, as configured\n")
		return
	case d.CUDA == 0:
		fmt.Fprintf(w, "driver\tnone\n")
		return
	}
	kind := map[Answer]string{Yes: "open modules", No: "closed modules", Unknown: "modules unknown"}[d.Open]
	fmt.Fprintf(w, "driver\tCUDA %s, %s, %s\n", dotted(d.CUDA), cmp.Or(d.Kernel, "version unknown"), kind)
	switch {
	case c.Forbid:
		fmt.Fprintf(w, "cuFile\tnot probed, as configured\n")
	case c.Failed != "" && c.Version == 0:
		fmt.Fprintf(w, "cuFile\tnone: %s\n", c.Failed)
	case c.Failed != "":
		fmt.Fprintf(w, "cuFile\t%s, does not start: %s\n", dotted(c.Version), c.Failed)
	case c.Version > 0:
		fmt.Fprintf(w, "cuFile\t%s, %s\n", dotted(c.Version), cmp.Or(c.NVFS, "without nvidia-fs"))
	}
}

func (r *Report) gpu(w io.Writer, g *GPU) {
	if g.Failed != "" {
		fmt.Fprintf(w, "GPU\t%s %s at %s: %s\n", g.Name, g.UUID, g.PCI, g.Failed)
		return
	}
	fmt.Fprintf(w, "GPU\t%s %s at %s%s, %s; pages copied by %s\n", g.Name, g.UUID, g.PCI, node(g.Node), config.SizeText(g.Bytes),
		g.Copies)
	for _, m := range r.Memory {
		if m.GPU == g.UUID {
			fmt.Fprintf(w,
				"\tkvhost takes about %s of it: run the engine with --gpu-memory-utilization %.2f or less\n",
				config.SizeText(m.Takes), m.Utilization)
		}
	}
}

func (r *Report) root(w io.Writer, root *Root, capacity int64) {
	if root.Memory {
		fmt.Fprintf(w, "root\t%s: %s of memory in %s\n", strings.TrimSuffix(root.Path, ":"), config.SizeText(capacity), r.Facts.Machine.pages(rootMemory(r.config)))
		return
	}
	if t := root.Bucket; t != nil {
		fmt.Fprintf(w, "root\t%s: a bucket; capacity %s; first byte after %s", root.Path, config.SizeText(capacity), t.FirstByte.Round(time.Millisecond))
		for i := range t.Read {
			fmt.Fprintf(w, "; %s at %s/s read, %s/s written", config.SizeText(int64(s3fs.TrialSizes[i])), config.SizeText(t.Read[i]),
				config.SizeText(t.Write[i]))
		}
		fmt.Fprintln(w)
		return
	}
	if root.FS == "" {
		fmt.Fprintf(w, "root\t%s: %s\n", root.Path, root.Failed)
		return
	}
	at := ""
	if root.Missing {
		at = " (does not exist yet; tested in " + root.Tried + ")"
	}
	direct := map[Answer]string{Yes: "direct I/O written and read back", No: "no direct I/O",
		Unknown: "direct I/O not tested"}[root.Direct]
	if root.Direct == Yes && root.MemAlign > 0 {
		direct += fmt.Sprintf(", aligned to %d (memory) and %d (offset)", root.MemAlign, root.OffAlign)
	}
	room := "its file system states no size"
	if root.Total > 0 {
		room = config.SizeText(root.Available) + " of " + config.SizeText(root.Total) + " available"
	}
	fmt.Fprintf(w, "root\t%s%s: %s on %s%s; capacity %s, %s; %s\n", root.Path, at, root.FS,
		cmp.Or(root.Device, "no disk"), node(root.Node),
		config.SizeText(capacity), room, direct)
}

func node(n int) string {
	if n < 0 {
		return ""
	}
	return fmt.Sprintf(", NUMA node %d", n)
}

func dotted(version int) string { return fmt.Sprintf("%d.%d", version/1000, version%1000/10) }

func loaded(yes bool, what string) string {
	if yes {
		return what
	}
	return "not " + what
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
