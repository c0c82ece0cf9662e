package s3fs

import "github.com/minio/minio-go/v7/pkg/credentials"

// profile reads the credentials of a profile's files for each request, since they may be renewed. Requests that begin while one reads share
// what it finds. While the files cannot be read, or are half written, what they held before counts.
type profile struct {
	credentials.FileAWSCredentials
	held credentials.Value
}

// RetrieveWithCredContext implements [credentials.Provider]. One request asks at a time.
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
