# To be sourced: lets Open MPI run where it would refuse or crawl: as root, with more ranks than cores, in a container. What is set
# already stays. The prefix OMPI_MCA_ is read by Open MPI 4 and by the ranks of 5, PRTE_ by the launcher of 5.
# shellcheck shell=bash

: "${OMPI_ALLOW_RUN_AS_ROOT:=1}" "${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:=1}"
: "${OMPI_MCA_rmaps_base_oversubscribe:=1}" "${PRTE_MCA_rmaps_default_mapping_policy:=:oversubscribe}"
# A rank has several threads (LibTorch's and the coordination thread); the default binds one or two ranks to one core each.
: "${OMPI_MCA_hwloc_base_binding_policy:=none}" "${PRTE_MCA_hwloc_default_binding_policy:=none}"
# Containers often forbid process_vm_readv.
: "${OMPI_MCA_btl_vader_single_copy_mechanism:=none}" "${OMPI_MCA_smsc:=^cma}"
# Open MPI 4 would map the machine's topology where it takes memory to be free, and crashes, rarely, where its stack grows to there.
: "${OMPI_MCA_rtc_hwloc_vmhole:=none}"
export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM OMPI_MCA_rmaps_base_oversubscribe PRTE_MCA_rmaps_default_mapping_policy \
  OMPI_MCA_hwloc_base_binding_policy PRTE_MCA_hwloc_default_binding_policy OMPI_MCA_btl_vader_single_copy_mechanism OMPI_MCA_smsc \
  OMPI_MCA_rtc_hwloc_vmhole

# Open MPI 5 starts in 0.16 s instead of 1.3, and quietly, without UCX. Version 4 has no transport of the name sm.
case "$(mpirun --version 2>/dev/null)" in
  *" 5."*)
    : "${OMPI_MCA_osc:=^ucx}" "${OMPI_MCA_pml:=ob1}" "${OMPI_MCA_btl:=self,sm,tcp}"
    export OMPI_MCA_osc OMPI_MCA_pml OMPI_MCA_btl
    ;;
esac
