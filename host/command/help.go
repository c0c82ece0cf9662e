package command

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/kvhost/kvhost/host/internal/config"
)

// everyday lists the settings that a command's help shows as flags. --help-all shows all settings.
var everyday = []string{"socket", "http.listen", "log.level"}

const (
	// sectionOf marks the flag of a setting with its section.
	sectionOf = "kvhost-section"

	groupServe  = "serve"
	groupRoots  = "roots"
	groupPolicy = "policy"
	groupOther  = "other"

	helpAllFlag = "help-all"
)

var groups = []struct{ id, title string }{
	{groupServe, "Serve:"}, {groupRoots, "Look after roots:"}, {groupPolicy, "Choose and write policies:"},
	{groupOther, "Other:"},
}

// group adds commands to a root command under a heading.
func group(root *cobra.Command, id string, commands ...*cobra.Command) {
	for _, c := range commands {
		c.GroupID = id
	}
	root.AddCommand(commands...)
}

// helpAll is the value of the flag --help-all. It ends the parsing of flags as --help does.
type helpAll struct{ wanted *bool }

func (h helpAll) String() string   { return "" }
func (h helpAll) Type() string     { return "bool" }
func (h helpAll) IsBoolFlag() bool { return true }
func (h helpAll) Set(string) error {
	*h.wanted = true
	return pflag.ErrHelp
}

// helper prints the help of commands.
type helper struct {
	all   bool
	width int
}

// goneFlags maps flags that earlier commands had to a text that says what decides now.
var goneFlags = map[string]string{
	"sim --hosts":         "; it is gone: it promised more hits than hosts have that lend to each other (docs/peers.md has what they had)",
	"sim --deal":          "; it is gone with --hosts",
	"sim --parallel":      "; it is gone: GOMAXPROCS in the environment is the number of runs at a time",
	"replay --page-bytes": "; it is gone: a page has 16KiB, or is the whole of a smaller chunk",
	"replay --layers":     "; it is gone: there are two layers, or one where the number of pages is odd",
	"replay --memory":     "; it is gone: a session has 128MiB for pages, and replays longer requests in parts",
}

// addHelp sets the help of a command and its subcommands. Commands with settings get the flag --help-all.
func addHelp(root *cobra.Command) {
	h := &helper{width: 100}
	if w, _, err := term.GetSize(int(os.Stdout.Fd())); err == nil && w > 40 {
		h.width = min(w, 120)
	}
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) { h.help(cmd.OutOrStdout(), cmd) })
	root.SetUsageFunc(func(cmd *cobra.Command) error { h.usage(cmd.OutOrStderr(), cmd); return nil })
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if h.all {
			return pflag.ErrHelp
		}
		if unknown := (*pflag.NotExistError)(nil); errors.As(err, &unknown) {
			var names []string
			cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
			name := "--" + unknown.GetSpecifiedName()
			return usageError{fmt.Errorf("%w%s", err, cmp.Or(goneFlags[cmd.Name()+" "+name], config.Gone(name), config.Suggest(name, names)))}
		}
		return usageError{err}
	})
	for _, cmd := range append(root.Commands(), root) {
		if settingsOf(cmd) > 0 {
			f := cmd.Flags().VarPF(helpAll{&h.all}, helpAllFlag, "",
				"print this help with all settings and the exit codes")
			f.NoOptDefVal = "true"
		}
	}
}

// settingsOf counts the flags of settings that the short help leaves out.
func settingsOf(cmd *cobra.Command) (n int) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden && f.Annotations[sectionOf] != nil {
			n++
		}
	})
	return n
}

func (h *helper) help(w io.Writer, cmd *cobra.Command) {
	fmt.Fprintf(w, "%s\n\n", reflow(cmp.Or(cmd.Long, cmd.Short+"."), h.width))
	h.usage(w, cmd)
}

// reflow wraps the paragraphs of a text. Lists, which have indented lines, stay unchanged.
func reflow(text string, width int) string {
	paragraphs := strings.Split(text, "\n\n")
	for i, p := range paragraphs {
		if strings.Contains(p, "\n  ") {
			continue
		}
		paragraphs[i] = strings.Join(config.Wrap(p, width), "\n")
	}
	return strings.Join(paragraphs, "\n\n")
}

func (h *helper) usage(w io.Writer, cmd *cobra.Command) {
	fmt.Fprintf(w, "Usage:\n")
	if cmd.Runnable() {
		fmt.Fprintf(w, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "  %s COMMAND\n", cmd.CommandPath())
	}
	if cmd.Example != "" {
		fmt.Fprintf(w, "\nExamples:\n%s\n", cmd.Example)
	}
	h.commands(w, cmd)
	h.flags(w, cmd)
	switch n := settingsOf(cmd); {
	case n == 0:
	case h.all:
		fmt.Fprintf(w, "\n%s\n", exitHelp)
	default:
		text := fmt.Sprintf("--%s lists %d more settings and the exit codes; `kvhost config --defaults` explains every setting.",
			helpAllFlag, n)
		fmt.Fprintf(w, "\n%s\n", reflow(text, h.width))
	}
}

func (h *helper) commands(w io.Writer, cmd *cobra.Command) {
	if !cmd.HasAvailableSubCommands() {
		return
	}
	list := func(title string, in func(*cobra.Command) bool) {
		first := true
		for _, c := range cmd.Commands() {
			if !c.IsAvailableCommand() || !in(c) {
				continue
			}
			if first {
				fmt.Fprintf(w, "\n%s\n", title)
				first = false
			}
			fmt.Fprintf(w, "  %-12s%s\n", c.Name(), c.Short)
		}
	}
	if cmd.HasParent() {
		list("Commands:", func(*cobra.Command) bool { return true })
		return
	}
	for _, g := range groups {
		list(g.title, func(c *cobra.Command) bool { return c.GroupID == g.id || c.GroupID == "" && g.id == groupOther })
	}
}

// flags prints the command's own flags. If all is wanted, it also prints the settings by section.
func (h *helper) flags(w io.Writer, cmd *cobra.Command) {
	set := func() *pflag.FlagSet {
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		f.SortFlags = false
		return f
	}
	own, settings := set(), map[string]*pflag.FlagSet{}
	var sections []string
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		section, ok := f.Annotations[sectionOf]
		if !ok || !f.Hidden {
			own.AddFlag(f)
			return
		}
		if settings[section[0]] == nil {
			settings[section[0]] = set()
			sections = append(sections, section[0])
		}
		shown := *f
		shown.Hidden = false
		settings[section[0]].AddFlag(&shown)
	})
	if own.HasAvailableFlags() {
		fmt.Fprintf(w, "\nFlags:\n%s", own.FlagUsagesWrapped(h.width))
	}
	if !h.all {
		return
	}
	for _, section := range sections {
		title := "Settings of [" + section + "]"
		if section == "" {
			title = "General settings"
		}
		fmt.Fprintf(w, "\n%s:\n%s", title, settings[section].FlagUsagesWrapped(h.width))
	}
}
