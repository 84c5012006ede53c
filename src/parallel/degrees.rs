//! What becomes of a mesh where layers spread their experts over different numbers of ranks.

use super::{Axis, MeshShape, PerLayer};

/// Of expert-parallel degrees.
impl PerLayer {
    /// Every axis of meshes that differ in these degrees alone.
    pub fn axes(&self, shape: &MeshShape) -> Vec<Axis> {
        let mut axes: Vec<Axis> = self.distinct().iter().flat_map(|&degree| shape.at(degree).axes()).collect();
        axes.sort_unstable();
        axes.dedup();
        axes
    }

    /// The name of an axis's groups in traffic and messages: with the degree of the experts, where there are several.
    pub fn name(&self, axis: Axis) -> String {
        match axis {
            Axis::Expert(degree) | Axis::ExpertData(degree) | Axis::ExpertNode(degree) if self.distinct().len() > 1 => {
                format!("{}_{degree}", axis.name())
            }
            _ => axis.name().to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_degrees_apart_where_there_are_several() {
        let names = |degrees: PerLayer| {
            degrees.axes(&MeshShape::of(4, 1)).into_iter().map(|axis| degrees.name(axis)).collect::<Vec<_>>()
        };
        let plain = ["world", "tensor", "data", "expert", "expert_tensor", "expert_data"];
        assert_eq!(names(PerLayer::Same(2)), plain);
        assert_eq!(names(PerLayer::Each(vec![2, 2])), plain);
        let several =
            ["world", "tensor", "data", "expert_1", "expert_4", "expert_tensor", "expert_data_1", "expert_data_4"];
        assert_eq!(names(PerLayer::Each(vec![4, 1, 4])), several);
    }
}
