package command

import (
	"math"

	"github.com/spf13/cobra"
)

func newPolicy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Write, check, pack and run policies",
	}
	wantCommand(cmd)
	cmd.AddCommand(newPolicyInspect(), newPolicyCheck(), newPolicyNew(), newPolicyPack())
	cmd.AddCommand(newPolicyList(), newPolicySwap(), newPolicyPromote())
	return cmd
}

var wantFiles = wantArgs(math.MaxInt, "a .wasm file")
