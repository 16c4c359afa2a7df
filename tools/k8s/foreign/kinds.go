// Package foreign names the published API types of other products whose objects the operator and the chart write.
// tools/foreign-crds generates their CustomResourceDefinitions for the tests from these, pinned by go.sum.
package foreign

import (
	_ "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	_ "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
	_ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	_ "github.com/ray-project/kuberay/ray-operator/apis/ray/v1"
	_ "sigs.k8s.io/kueue/apis/kueue/v1beta1"
	_ "sigs.k8s.io/kueue/apis/kueue/v1beta2"
	_ "sigs.k8s.io/lws/api/leaderworkerset/v1"
)
