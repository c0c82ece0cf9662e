package command

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/plugins/dist"
)

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version, the policy ABI and the embedded policies",
		Args:  noArgs,
		Run: func(*cobra.Command, []string) {
			names := "none"
			if n := dist.Names(); len(n) > 0 {
				names = strings.Join(n, " ")
			}
			fmt.Printf("kvhost %s\n%s %s/%s\npolicy abi %d, release %s\nembedded policies: %s\n",
				version, runtime.Version(), runtime.GOOS, runtime.GOARCH, abi.Version, abi.Release, names)
		},
	}
}
