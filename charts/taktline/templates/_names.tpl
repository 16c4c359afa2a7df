{{/* Labels of every object; call with a dict of root and component. */}}
{{- define "taktline.labels" -}}
app.kubernetes.io/name: taktline-{{ .component }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: taktline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* An image with the registry in front. */}}
{{- define "taktline.image" -}}
{{- if .root.Values.imageRegistry }}{{ trimSuffix "/" .root.Values.imageRegistry }}/{{ end }}{{ .image }}
{{- end }}

{{/* Pod and container security, alike for all our pods: the restricted Pod Security Standard, and a read-only root. */}}
{{- define "taktline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "taktline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What the operator needs in the namespaces it serves. */}}
{{- define "taktline.operatorRules" -}}
- apiGroups: [taktline.dev]
  resources: [policydeployments]
  verbs: [get, list, watch]
- apiGroups: [taktline.dev]
  resources: [policydeployments/status]
  verbs: [patch]
- apiGroups: [taktline.dev]
  resources: [policydeployments/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments, statefulsets, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
{{- if .Values.operator.checkSecrets }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [create]
# The Prometheus operator's kinds, where the cluster has them.
- apiGroups: [monitoring.coreos.com]
  resources: [prometheusrules, podmonitors]
  verbs: [get, list, create, patch, delete]
# Kinds of other products, where the cluster has them: workers of several pods.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, create, patch, delete]
# Planners on Ray clusters (KubeRay), and numbers of workers that KEDA sets.
- apiGroups: [ray.io]
  resources: [rayservices]
  verbs: [get, list, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, create, patch, delete]
# To say why workers wait in a queue of Kueue's. Without this right the operator does without.
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues]
  verbs: [get]
{{- end }}
