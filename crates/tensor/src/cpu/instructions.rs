//! What this CPU has of what kernels are made for.

/// The instruction sets that kernels use here beside those that any processor has.
pub fn instruction_sets() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        use super::bgemm::Bf16Unit;
        let bf16 = Bf16Unit::of_this_cpu();
        let sets = [
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"), "AVX2"),
            (is_x86_feature_detected!("avx512f"), "AVX-512"),
            (bf16.is_some(), "AVX512-BF16"),
            (bf16 == Some(Bf16Unit::Amx), "AMX"),
        ];
        sets.into_iter().filter(|(is_there, _)| *is_there).map(|(_, name)| name).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}
