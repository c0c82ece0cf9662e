// Package crashfs is a test double of [staging.FS]: a file system on a machine that can lose power. It records what is
// not yet durable and, on [FS.PowerLoss], discards a random part of it, as a crash would. Only tests import it.
package crashfs
