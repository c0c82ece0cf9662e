package s3fs

import "github.com/minio/minio-go/v7/pkg/credentials"

// profile reads the credentials from the files of a profile for each request, because they may be renewed. Requests that begin during a
// read share its result. While the files cannot be read or are incomplete, the previous credentials are used.
type profile struct {
	credentials.FileAWSCredentials
	held credentials.Value
}

// RetrieveWithCredContext implements [credentials.Provider]. One request reads the files at a time.
func (p *profile) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	v, err := p.FileAWSCredentials.RetrieveWithCredContext(cc)
	switch {
	case err == nil && v.AccessKeyID != "":
		p.held = v
	case p.held.AccessKeyID != "":
		return p.held, nil
	}
	return v, err
}
