module engage.test/client

go 1.21
