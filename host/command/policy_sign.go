package command

import (
	"crypto/rand"
	"encoding"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"aead.dev/minisign"
	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/regular"
)

const keySuffix, publicSuffix = ".key", ".pub"

// maxKeyFile is more than a key's file can have.
const maxKeyFile = 64 << 10

func newPolicyKeygen() *cobra.Command {
	return &cobra.Command{
		Use:   "keygen NAME",
		Short: "Make a key pair for signing modules: NAME.key and NAME.pub",
		Long: `Makes a key pair in minisign's format. NAME.key is the secret key, without a password and with
mode 0600: keep it where you keep passwords. Give NAME.pub to operators; its last line is public_key in their
configuration.`,
		Example: "  kvhost policy keygen vendor",
		Args:    wantArgs(1, 1, "one name for the key files"),
		RunE: func(cmd *cobra.Command, args []string) error {
			public, secret, err := minisign.GenerateKey(rand.Reader)
			if err != nil {
				return err
			}
			if err := writeKey(args[0]+keySuffix, secret, 0o600); err != nil {
				return err
			}
			if err := writeKey(args[0]+publicSuffix, public, 0o644); err != nil {
				return errors.Join(err, os.Remove(args[0]+keySuffix)) // half a pair is none
			}
			fmt.Fprintf(cmd.OutOrStdout(), "public_key = \"%s\"\n", public)
			return nil
		},
	}
}

// writeKey makes a file that was not there: a key is never overwritten.
func writeKey(path string, key encoding.TextMarshaler, mode os.FileMode) error {
	text, err := key.MarshalText()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	return errors.Join(err, f.Close())
}

func newPolicySign() *cobra.Command {
	var secret string
	cmd := &cobra.Command{
		Use:     "sign FILE...",
		Short:   "Sign modules: writes FILE" + policy.SignatureSuffix,
		Example: "  kvhost policy sign --key vendor.key mine.wasm",
		Args:    wantFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			if secret == "" {
				return usageError{errors.New("policy sign: want --key FILE (kvhost policy keygen makes one)")}
			}
			text, err := regular.ReadFile(cmd.Context(), secret, maxKeyFile)
			if err != nil {
				return err
			}
			key, err := policy.ParseSecretKey(text)
			if err != nil {
				return fmt.Errorf("%s: %w", secret, err)
			}
			for _, path := range args {
				module, err := regular.ReadFile(cmd.Context(), path, sandbox.MaxModuleBytes)
				if err != nil {
					return err
				}
				signature, err := policy.Sign(key, filepath.Base(path), module)
				if err != nil {
					return err
				}
				if err := replaceFile(path+policy.SignatureSuffix, signature); err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s, by key %s\n", path+policy.SignatureSuffix, policy.KeyID(key.ID()))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&secret, "key", "", "the secret key, from keygen or minisign -G -W")
	return cmd
}
