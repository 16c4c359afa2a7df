"""The simulated workcell as MJCF: a table, a four-joint arm with a wrist camera, three coloured blocks."""

from __future__ import annotations

from taktline_demo.kinematics import FOREARM, JOINT_HIGH, JOINT_LOW, SHOULDER_HEIGHT, TOOL, UPPER_ARM

JOINTS = ("yaw", "shoulder", "elbow", "wrist")
COLOURS = ("red", "green", "blue")
CAMERAS = ("scene", "wrist")

BLOCK_HALF = 0.02
"""Half the edge of a block, m."""
PHYSICS_STEP_S = 0.005

_RGBA = {"red": "0.90 0.10 0.10 1", "green": "0.10 0.75 0.15 1", "blue": "0.12 0.25 0.95 1"}


def _actuators() -> str:
    gains = {"yaw": (60, 6), "shoulder": (90, 9), "elbow": (60, 5), "wrist": (15, 0.8)}
    return "\n".join(
        f'    <position name="{name}" joint="{name}" kp="{kp}" kv="{kv}" ctrlrange="{low} {high}"/>'
        for (name, (kp, kv)), low, high in zip(gains.items(), JOINT_LOW, JOINT_HIGH, strict=True)
    )


def _joint(name: str, axis: str) -> str:
    index = JOINTS.index(name)
    return (
        f'<joint name="{name}" type="hinge" axis="{axis}" range="{JOINT_LOW[index]} {JOINT_HIGH[index]}" '
        'damping="0.4" armature="0.01"/>'
    )


def _blocks() -> str:
    return "\n".join(
        f'    <body name="{colour}" pos="0.3 {0.1 * index} {BLOCK_HALF}"><freejoint name="{colour}"/>'
        f'<geom type="box" size="{BLOCK_HALF} {BLOCK_HALF} {BLOCK_HALF}" rgba="{_RGBA[colour]}" mass="0.05"/></body>'
        for index, colour in enumerate(COLOURS)
    )


def workcell_xml() -> str:
    """The MJCF document. Lengths in m, angles in rad; the arm stands at the origin and faces +x."""
    return f"""
<mujoco model="takt workcell">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{PHYSICS_STEP_S}" integrator="implicitfast"/>
  <visual>
    <global offwidth="640" offheight="640"/>
    <quality shadowsize="0" offsamples="4"/>
    <headlight ambient="0.45 0.45 0.45" diffuse="0 0 0" specular="0 0 0"/>
    <map znear="0.02" zfar="8"/>
  </visual>
  <default>
    <geom friction="1.2 0.02 0.001"/>
    <default class="link">
      <geom type="capsule" rgba="0.93 0.93 0.95 1" mass="0.15" contype="0" conaffinity="0"/>
    </default>
  </default>
  <worldbody>
    <light directional="true" castshadow="false" dir="-0.35 0.35 -1" diffuse="0.50 0.50 0.50" specular="0 0 0"/>
    <light directional="true" castshadow="false" dir="-0.8 -0.4 -0.5" diffuse="0.25 0.25 0.25" specular="0 0 0"/>
    <geom name="table" type="plane" size="1.2 1.2 0.05" rgba="0.62 0.60 0.57 1"/>
    <camera name="scene" pos="0.86 0 0.62" xyaxes="0 1 0 -0.66 0 0.75" fovy="40"/>
    <body name="base" gravcomp="1">
      <geom class="link" type="cylinder" size="0.06 0.025" pos="0 0 0.025" rgba="0.25 0.27 0.30 1"/>
      <geom class="link" fromto="0 0 0.03 0 0 {SHOULDER_HEIGHT}" size="0.035" rgba="0.25 0.27 0.30 1"/>
      <body name="turret" gravcomp="1" pos="0 0 {SHOULDER_HEIGHT}">{_joint("yaw", "0 0 1")}
        <geom class="link" type="sphere" size="0.038"/>
        <body name="upper" gravcomp="1">{_joint("shoulder", "0 -1 0")}
          <geom class="link" fromto="0.02 0 0 {UPPER_ARM} 0 0" size="0.024"/>
          <body name="fore" gravcomp="1" pos="{UPPER_ARM} 0 0">{_joint("elbow", "0 -1 0")}
            <geom class="link" fromto="0 0 0 {FOREARM} 0 0" size="0.020" rgba="0.98 0.70 0.10 1"/>
            <body name="hand" gravcomp="1" pos="{FOREARM} 0 0">{_joint("wrist", "0 -1 0")}
              <geom class="link" fromto="0 0 0 {TOOL - 0.012} 0 0" size="0.012" rgba="0.25 0.27 0.30 1"/>
              <geom name="tip" type="sphere" pos="{TOOL - 0.008} 0 0" size="0.008" rgba="0.08 0.08 0.09 1" mass="0.01"/>
              <site name="tip" pos="{TOOL} 0 0" size="0.004" rgba="0 0 0 0"/>
              <camera name="wrist" pos="-0.05 0 0.075" xyaxes="0 -1 0 0.20 0 0.98" fovy="78"/>
            </body>
          </body>
        </body>
      </body>
    </body>
{_blocks()}
  </worldbody>
  <actuator>
{_actuators()}
  </actuator>
</mujoco>
"""
